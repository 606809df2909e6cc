"""Local SGD with an outer optimizer: workers train alone between exchanges."""
