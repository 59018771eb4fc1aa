"""The engine: sessions, the decoding loop, the ladder, the ring, speculation and sampling."""
