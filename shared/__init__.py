"""What more than one process of Headrace needs: names, wire types, the bus, objects, settings, errors, metrics."""
