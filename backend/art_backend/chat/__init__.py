"""From chat messages to token ids and back: templates, tool-call markup, and training rows from plain text."""
