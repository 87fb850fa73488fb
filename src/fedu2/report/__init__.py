"""What a run shows: its figures, and a page that compares runs."""
