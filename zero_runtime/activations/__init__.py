"""What blocks keep from forward to backward: recomputation, activation offload, the tiled loss."""
