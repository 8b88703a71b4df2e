"""Write a study as one self-contained HTML page, Markdown and CSV."""
