"""How does one command run target, drafter and gateway here? Their processes, addresses, logs and readiness."""
