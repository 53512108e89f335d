"""The parts of a decoder, in the order a token meets them."""
