"""Drafters: they propose tokens for the target model to verify."""
