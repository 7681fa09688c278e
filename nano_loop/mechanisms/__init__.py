"""What the steps are built of: ways to change what torch does, each of which can be taken back."""
