"""The chat: a conversation, who answers it (a model here, or a server), where it is kept, and its terminal."""
