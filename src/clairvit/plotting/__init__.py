"""Show: raw maps become pictures and files. The only room that clips, upsamples or colours."""
