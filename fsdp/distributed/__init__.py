"""Communication between ranks: process groups, collectives, streams, `DTensor`."""
