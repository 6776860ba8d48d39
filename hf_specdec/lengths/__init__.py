"""Decides how long drafts are. Times are passed in; nothing here reads a clock."""
