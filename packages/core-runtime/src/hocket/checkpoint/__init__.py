"""State on the disk: a file for each rank, a manifest that is written last, and folders of such checkpoints.

This package knows of files, tensors and ranks; `hocket.session.save` says what a session keeps in them.
Importing it imports no torch.
"""
