"""Language models, their tokenizers and chat templates, and conversion to and from Hugging Face."""
