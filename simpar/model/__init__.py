"""What is trained: transformers, Hugging Face configs, any torch module; and their work."""
