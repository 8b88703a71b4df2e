"""The web page and its API: `clairvit serve`. Imports everybody, imported by nobody but the command line."""
