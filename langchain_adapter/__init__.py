"""LangChain chat model for Gemma bundles."""
