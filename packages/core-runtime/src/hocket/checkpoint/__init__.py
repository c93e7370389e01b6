"""State on the disk: a file for each rank, a manifest that is written last, folders of checkpoints, and exports.

This package knows of files, tensors and ranks; `hocket.session.save` says what a session keeps in them.
Importing it imports no torch.
"""

#: The file of a whole model.
MODEL = "model.safetensors"
