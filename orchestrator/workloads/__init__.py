"""What is trained: models built from configuration (`models.py`) and the tokens they read (`data.py`)."""
