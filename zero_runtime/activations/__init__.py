"""Memory of activations from forward to backward: recomputation, activation offload, tiled loss."""
