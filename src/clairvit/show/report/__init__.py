"""A study written up: one page that stands alone, the same tables as Markdown, and their numbers as CSV."""
