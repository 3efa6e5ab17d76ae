"""What a run makes of its hardware: operations, energy and money, in columns, rows and a section of the page."""
