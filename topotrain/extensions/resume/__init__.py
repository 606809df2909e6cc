"""What a script needs to go on where an earlier process stopped."""
