"""The search of `nano-loop tune`: a script runs once a candidate, as a child that takes some steps and reports them."""
