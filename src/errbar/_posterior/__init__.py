"""From data to posterior: what is asked, the information, the prior, the posterior."""
