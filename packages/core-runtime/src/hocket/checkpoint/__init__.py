"""State on the disk: a file for each rank, a manifest that is written last, and folders of such checkpoints.

This package knows of files, tensors and ranks; what a session keeps in them is in `hocket.session.state`. Importing it
imports no torch.
"""
