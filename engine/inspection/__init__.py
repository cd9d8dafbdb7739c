"""The pool as people look at it: asked for over the seam, and computed only then."""
