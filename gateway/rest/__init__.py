"""How does OpenAI's HTTP API look from here? Checks requests, submits generations, writes answers, also streamed."""
