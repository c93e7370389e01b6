"""GossipGraD: gossip with a constant number of messages a step, and rotation of partners and of samples.

Source: J. Daily, A. Vishnu, C. Siegel, T. Warfel, V. Amatya, "GossipGraD: Scalable Deep Learning using Gossip
Communication based Asynchronous Gradient Descent", 2018, arXiv:1803.05880.

This module imports no torch.
"""

from hocket_gossipgrad.dissemination import Dissemination
from hocket_gossipgrad.hypercube import Hypercube
from hocket_gossipgrad.random_push import RandomPush
from hocket_gossipgrad.ring_shuffle import RingShuffle
from hocket_gossipgrad.rotated import Rotated, Shuffles

__all__ = ["Dissemination", "Hypercube", "RandomPush", "RingShuffle", "Rotated", "Shuffles"]
