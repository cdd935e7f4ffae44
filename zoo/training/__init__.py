"""Training: one supervised loop for every domain, and the leaves that other loops share."""
