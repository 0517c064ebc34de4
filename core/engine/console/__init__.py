"""What commands, the chat and the server share: their options and settings, notes, waits, and a model that is opened."""
