"""Chats: lists of messages, which the chat template of a tokenizer writes as texts."""
