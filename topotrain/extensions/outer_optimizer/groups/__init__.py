"""Worker groups of several workers that train by themselves between rounds."""
