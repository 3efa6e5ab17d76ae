"""The models to train, built from configuration (`models.py`), and the tokens that they read (`data.py`)."""
