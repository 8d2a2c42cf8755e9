//! Files of page-aligned frames, read and written without bounce copies where the file system can.
