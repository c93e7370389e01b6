"""The frameworks' own tests of distributed training, an adapter each; `tools/theirs` carries them out."""
