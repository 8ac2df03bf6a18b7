"""The inference engine over HTTP, in OpenAI's wire format."""
