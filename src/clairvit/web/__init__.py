"""The web page and its API: `clairvit serve`. Only the command line imports this package."""
