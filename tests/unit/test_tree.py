"""The mirror's tree: what changed while a listing was on its way wins over the listing."""

from fusefs.core.tree import Tree
from fusefs.rules.model import Attrs, Kind, NodeRow


def row(node_id: str, name: str, ino: int, version: int) -> NodeRow:
    return NodeRow(node_id, f"/{name}", Kind.FILE, ino, version, 1, 0o644, None, None, version, version, "s1")


def test_listing_from_before_a_rename_over_a_file() -> None:
    """The first listing after announcements were lost may take a row back to a lower version, as a server may that
    lost commits. It takes back nothing that this daemon was told since it asked."""
    tree = Tree()
    tree.root.touched = set()
    before = [row("old", "moved", ino=11, version=76), row("new", "source", ino=12, version=1)]
    tree.fill(tree.root, before)
    source = tree.root.children["source"]
    source.inodes.append("the kernel knows it")
    tree.unload()

    tree.root.touched = set()
    tree.attach(source, tree.root, "moved")
    tree.rekey(source, "old")
    source.update(row("old", "moved", ino=12, version=77))
    tree.fill(tree.root, before)

    assert tree.root.children == {"moved": source}
    assert (source.version, source.gone, tree.went_back) == (77, False, [])


def test_a_node_whose_attributes_are_not_stored_yet_is_not_forgotten() -> None:
    """The row that would be loaded next does not have them."""
    tree = Tree()
    tree.fill(tree.root, [row("f", "f", ino=11, version=1)])
    node = tree.root.children["f"]
    node.held = Attrs(mode=0o600)
    tree.unload()
    tree.drop(node)
    tree.root.touched = set()
    tree.fill(tree.root, [row("f", "f", ino=11, version=1)])
    assert tree.root.children == {"f": node}
    assert node.mode == 0o600
    node.held = None
    tree.unload()
    assert not tree.root.children
