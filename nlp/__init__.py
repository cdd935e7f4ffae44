"""Natural language: BERT, its text preprocessing and the tasks it is used for."""
