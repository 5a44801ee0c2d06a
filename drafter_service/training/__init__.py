"""Training and measuring EAGLE-3 heads for a target model of the user's own."""
