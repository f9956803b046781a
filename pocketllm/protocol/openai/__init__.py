"""OpenAI's dialect: chat and plain completions."""
