"""Where the model is cut into stages, and what has to fit on a rank."""
