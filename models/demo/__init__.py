"""The embedded demo: a tiny Mixtral in Hugging Face format, and the text and script that made it."""
