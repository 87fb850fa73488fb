"""The federation: rounds, local training, flat models, checkpoints, and the backends that execute clients."""
