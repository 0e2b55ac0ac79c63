"""What follows from a posterior: which action to take, what to label next, which inputs and labels to look at."""
