"""Saving and loading: checkpoints, save points, and the replicas' mean."""
