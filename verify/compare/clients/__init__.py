"""Real clients of OpenAI's and Anthropic's APIs, against vLLM and a pair behind the router."""
