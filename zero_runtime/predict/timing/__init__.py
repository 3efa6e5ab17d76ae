"""Predicted times of training steps, and the measurements that predictions are made from."""
