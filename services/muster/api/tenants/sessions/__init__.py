"""Sessions: browsers that are signed in."""
