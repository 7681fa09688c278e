"""Multiple processes: how they are launched, how they find each other, and how data is sent between them."""
