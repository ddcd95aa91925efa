from raydispatch.actors.names import NAMESPACE, controller_name, replica_name, router_name


def test_every_actor_of_a_system_has_a_name_of_its_own_under_the_name_of_the_system() -> None:
    names = [
        controller_name("shop"),
        router_name("shop", 1),
        router_name("shop", 2),
        replica_name("shop", "billing-1"),
        replica_name("shop", "router-1"),
    ]

    assert len(set(names)) == len(names)
    assert all(name.startswith(f"{NAMESPACE}/shop/") for name in names)


def test_the_names_of_two_systems_never_meet_even_if_one_begins_like_the_other() -> None:
    assert not controller_name("shop2").startswith("raydispatch/shop/")
    assert replica_name("shop", "a") != replica_name("shop2", "a")
