"""Scripts for people who work on erllama; nothing here is installed."""
