"""Train any data set, network and method of the paper: config, the one loop, the run folder."""
